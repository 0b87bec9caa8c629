"""`specdec verify`: path identity as something a user can run."""
