"""mtpc in other engines and libraries: what they share, and a package for each host."""
