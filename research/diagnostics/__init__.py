"""What training changed, layer by layer and depth by depth: the measures behind the paper's diagnostic figures."""
