"""mtpc inside other engines and libraries: shared modules, and one package per host."""
