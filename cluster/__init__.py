"""More than one machine: replicas of specdec behind a proxy, and the planner that says how many are needed."""
