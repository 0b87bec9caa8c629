"""Analysis: from records to a verdict."""
