"""The ground floor: what a tier is made of, knowing nothing of either tier."""
