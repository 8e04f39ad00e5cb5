"""Making a draft model: from what start, on what texts, by which loss, and how much more of it is accepted."""
