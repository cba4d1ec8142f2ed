"""Training configurations: TOML files with typed sections, checked before anything is allocated."""

from __future__ import annotations

from pipert.config.config import Config
from pipert.config.reading import load_config, parse_config
from pipert.config.sections import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig

__all__ = [
    "Config",
    "DataConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "load_config",
    "parse_config",
]
