"""What tenants may use, and how clients learn of it. Never admits more than a limit's root has lent."""
