"""What both tiers are made of; imports neither tier."""
