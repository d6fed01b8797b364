"""Authentication, tokens, logins, webhook signatures, access rules."""
