"""Training MTP layers on a user's text, with the target frozen."""
