from trainer.models.own import *
