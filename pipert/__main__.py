"""``python -m pipert`` is the ``pipert`` command."""

from __future__ import annotations

from pipert.cli import main

if __name__ == "__main__":
    main()
