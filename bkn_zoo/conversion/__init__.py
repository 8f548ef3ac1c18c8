"""From batch normalization to BKN."""
