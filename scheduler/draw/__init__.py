"""Pictures of schedules and timelines: as text for a terminal (`text`), as SVG for a page (`svg`)."""
