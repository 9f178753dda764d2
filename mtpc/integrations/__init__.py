"""mtpc inside other people's servers and libraries, by the seams that these offer."""
