"""File formats of schedules and programs."""
