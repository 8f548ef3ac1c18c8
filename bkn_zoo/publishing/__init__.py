"""Model cards, records of results, and publication on the Hub."""
