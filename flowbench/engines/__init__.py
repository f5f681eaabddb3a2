"""The engines that come along: the only place where flowbench meets a framework."""
