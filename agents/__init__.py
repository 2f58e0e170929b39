"""The agent layer: renderer, policies and rollouts, which turn an environment and a policy into trajectories."""
