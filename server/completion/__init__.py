"""Code completion, whatever the transport: prompts that fill a gap, sessions that follow an editor, outcomes."""
