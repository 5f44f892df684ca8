"""What the backends on Google Cloud share: whose word counts, clients, what refusals mean, checks before creation."""
