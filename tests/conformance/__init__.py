"""One suite for all backends: every feature, shape, layout and dtype of the contract against the oracle."""
