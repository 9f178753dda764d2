"""mtpc inside other people's engines and libraries: what they share, and a package for each host."""
