"""The experiments of offmap: tasks, competitors, plans, the runner, paper tables, speed, faults."""
