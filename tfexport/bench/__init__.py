"""Speed of a bundle beside other engines."""
