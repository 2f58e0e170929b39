"""Composition root: config tree, recipes, command line, and what puts the layers together. Importing it costs nothing."""
