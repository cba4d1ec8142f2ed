"""Who talks to whom: transports, mesh, groups, waiting, watchdog."""
