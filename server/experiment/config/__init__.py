"""What an experiment is to be: its arms, how requests get into them, what is compared and when it ends."""
