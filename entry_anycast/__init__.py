"""`farhop anycast`: announces an entry's prefixes while the entry is fit, and takes them back before it is not."""
