"""The tier's state: entries and their health, client networks and their distances. Pure."""
