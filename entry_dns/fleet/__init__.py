"""What the tier knows: entries and how they are, client networks and what is near to them. Pure."""
