"""Plans: how to spread a training job over devices, searched in arrays and priced as ``predict`` prices one."""
