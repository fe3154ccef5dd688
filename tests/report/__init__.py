"""The report's page and what it is made of."""
