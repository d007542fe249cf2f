"""DNS answers: parsing, prepared answers, signatures, cookies, rate limits. Pure: no socket, no clock."""
