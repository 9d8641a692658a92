"""`python -m tfexport` is the command line."""

from tfexport.cli import main

if __name__ == "__main__":
    main()
