"""The algorithms of the papers: results against the oracle, counts against their closed forms."""
