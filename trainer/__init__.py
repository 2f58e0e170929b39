"""Groups in, weights out: advantages, batches, losses, the learner, checkpoints, warm start, the loop, and trackers."""
