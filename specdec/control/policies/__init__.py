"""What the controller decides, as pure functions of estimates: who drafts, how deep, which nodes are verified."""
