"""The composition root: config tree, recipes, command line, and what puts the layers together into a run."""
