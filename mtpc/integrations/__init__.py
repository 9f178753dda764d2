"""mtpc inside other engines: what they share, and one package for each host."""
