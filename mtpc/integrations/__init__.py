"""mtpc inside other engines and libraries: shared modules, and one package for each host."""
