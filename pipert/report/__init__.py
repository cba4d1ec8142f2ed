"""What a run tells: metrics, progress, measured peaks, pictures."""

from __future__ import annotations
