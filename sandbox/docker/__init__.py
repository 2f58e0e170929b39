"""Boxes in Docker containers, and all that touches the Docker SDK. Imported only when Docker is asked for."""
