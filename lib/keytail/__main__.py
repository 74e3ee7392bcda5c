"""`python -m keytail` is the command `keytail`."""

from keytail.main.main import main

if __name__ == "__main__":
    main()
