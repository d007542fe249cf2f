"""From a request's head to the Request that a machine decides on. Never chooses where it goes."""
