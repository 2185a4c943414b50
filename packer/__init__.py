"""Write side: raw image data sets to packed ones. The command line is ``packer.cli``; in code call ``packer.build.build``.

Empty on purpose: ``import packer.cli`` must not load torch.
"""
