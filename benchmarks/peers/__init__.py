"""The engines that mtpc is compared with, each in a process of its own."""
