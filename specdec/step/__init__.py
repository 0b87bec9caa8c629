"""One engine step: plan, propose, verify, commit."""
