"""The measurements of FewLabel.

This file makes them a package. Opacus installs one of the same name, which Python would prefer to a mere folder.
"""
