"""What the world is told: model cards, results, publication."""
