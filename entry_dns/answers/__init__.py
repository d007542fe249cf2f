"""What is answered: DNS messages, prepared answers, cookies, rates. Pure: no socket, no clock."""
