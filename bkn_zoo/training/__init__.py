"""Trains networks from a recipe and a data set."""
