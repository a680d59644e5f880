"""What heroes wish for, what goes wrong, and how a thing from a friend sets it right. Data only.

Every string is a template (`template.py`). The trouble comes before the friend, the remedy after the gift.
The remedy names the trouble's `tool`, which the friend has given.
"""

from __future__ import annotations

from tools.demo_model.wish import Trouble, Wish

WISHES = (
    Wish(
        "fly a kite",
        "{Hero.they} [often watched the clouds race by|loved the wind more than anything else in the world].",
        "{hero} ran against the wind with a kite made of paper.",
        (
            Trouble(
                "But the string snapped, and the kite fell down with a sad little flop.",
                "ribbon",
                "They tied the ribbon to the kite in place of the string, and up it went.",
            ),
            Trouble(
                "But there was a hole in the kite, and the wind blew right through it.",
                "handkerchief",
                "They laid the handkerchief over the hole and sewed it tight.",
            ),
        ),
        "Soon the kite was dancing so high that it looked like a small bird.",
    ),
    Wish(
        "bake a cake",
        "{Hero.they} [dreamed of flour and sugar every night|could think of nothing but warm, sweet cake].",
        "{hero} put on an apron and began to stir.",
        (
            Trouble(
                "But the bowl had a crack, and the batter ran out over the table.",
                "bowl",
                "They mixed everything once more in the bowl, and not a drop was lost.",
            ),
            Trouble(
                "But the sugar jar was empty, without a single grain in it.",
                "honey pot",
                "They took honey from the honey pot, and it was even sweeter than sugar.",
            ),
        ),
        "The cake came out of the oven round and golden, and it smelled wonderful.",
    ),
    Wish(
        "touch the moon",
        "{Hero.they} [said good night to it every evening|thought that it must be as smooth as a pearl].",
        "{hero} climbed onto the highest rock and waited for the night.",
        (
            Trouble(
                "But the moon was much too far away, even on tiptoe.",
                "bucket",
                "They filled the bucket with water, and there lay the moon, close enough to touch.",
            ),
            Trouble(
                "But thick clouds came, and the moon was gone.",
                "mirror",
                "They waited until the clouds had passed, and caught the moon in the mirror.",
            ),
        ),
        "Very gently {hero} put a hand on the shining moon and laughed.",
    ),
    Wish(
        "learn to swim",
        "{Hero.they} [envied every little fish|wanted to glide through the water like a leaf].",
        "{hero} walked to the water and put in one toe.",
        (
            Trouble(
                "But the water was so cold that {hero.they} jumped right back.",
                "towel",
                "They put the towel in the sun, and {hero} knew that it would be warm and waiting.",
            ),
            Trouble(
                "But each time {hero.they} tried, {hero.they} sank like a stone.",
                "swimming ring",
                "They blew up the swimming ring, and now {hero} floated like a cork.",
            ),
        ),
        "Before lunch {hero} swam a whole circle, and then another one.",
    ),
    Wish(
        "grow a sunflower",
        "{Hero.they} [kept one striped seed in a matchbox|had once seen a flower as tall as a house].",
        "{hero} dug a small hole and laid a seed in it.",
        (
            Trouble(
                "But the ground was as dry as dust, and nothing came up.",
                "watering can",
                "They carried water in the watering can every morning and every evening.",
            ),
            Trouble(
                "But a hungry beetle ate the first green leaf.",
                "flowerpot",
                "They moved the tiny plant into the flowerpot, where no beetle could reach it.",
            ),
        ),
        "Week by week the sunflower grew, until it looked over the roof and smiled.",
    ),
    Wish(
        "build a boat",
        "{Hero.they} [longed to see what lies behind the waves|had already drawn it on every piece of paper].",
        "{hero} hammered seven boards together and pushed them into the water.",
        (
            Trouble(
                "But there was a hole in the bottom, and the water came bubbling in.",
                "cork",
                "They pressed the cork into the hole, and the boat stayed dry.",
            ),
            Trouble(
                "But the boat had no sail, so it only turned in circles.",
                "blanket",
                "They hung the blanket on a pole, and it made the finest sail.",
            ),
        ),
        "The boat slid over the water like a swan, and the waves clapped.",
    ),
    Wish(
        "sing for everyone",
        "{Hero.they} [hummed from morning to night|knew a hundred songs by heart].",
        "{hero} stood on a box and took a deep breath.",
        (
            Trouble(
                "But the voice that came out was so small that nobody heard it.",
                "paper horn",
                "They rolled the paper tight, and through the paper horn the voice was as big as a bell.",
            ),
            Trouble(
                "But all at once the words were gone.",
                "notebook",
                "They wrote every word of the song into the notebook.",
            ),
        ),
        "When the last note faded, there was a long silence, and then everybody cheered.",
    ),
    Wish(
        "catch a falling star",
        "{Hero.they} [counted the stars before going to sleep|believed that a star would make a lovely lamp].",
        "{hero} packed a net and stayed up late.",
        (
            Trouble(
                "But the star fell into the tall grass and could not be found.",
                "lantern",
                "They lit the lantern and searched, until something in the grass winked back.",
            ),
            Trouble(
                "But the star was much too hot to hold.",
                "mitten",
                "They put on the mitten and picked up the star as carefully as an egg.",
            ),
        ),
        "The star hummed a quiet tune and lit up the whole night.",
    ),
    Wish(
        "paint a rainbow",
        "{Hero.they} [thought that grey walls were a great pity|wanted a rainbow that would stay].",
        "{hero} opened the paint box and found the longest wall.",
        (
            Trouble(
                "But one colour was missing, and a rainbow cannot do without it.",
                "paint pot",
                "They opened the paint pot, and it was just what the rainbow needed.",
            ),
            Trouble(
                "But it began to rain, and the wet paint ran down the wall.",
                "umbrella",
                "They held the umbrella over the wall until the paint was dry.",
            ),
        ),
        "Now there was a rainbow even on days without sun or rain.",
    ),
    Wish(
        "ring the big bell",
        "{Hero.they} [loved the sound of it on holidays|wondered if it could be heard in the next country].",
        "{hero} climbed all the steps up to the bell.",
        (
            Trouble(
                "But the rope hung too high, and jumping did not help.",
                "stool",
                "They put the stool under the bell, and now the rope was near enough.",
            ),
            Trouble(
                "But the old rope was worn, and it broke in two.",
                "rope",
                "They tied the rope to the bell with three good knots.",
            ),
        ),
        "Ding, dong, went the bell, and all the windows opened.",
    ),
    Wish(
        "send a letter",
        "{Hero.they} [had a cousin who lived far away|had so many nice things to tell].",
        "{hero} wrote four pages and folded them neatly.",
        (
            Trouble(
                "But there was no stamp on the letter, and the post would not take it.",
                "stamp",
                "They licked the stamp and pressed it down hard.",
            ),
            Trouble(
                "But the wind took the pages and blew them all over the place.",
                "envelope",
                "They gathered the pages and put them safely into the envelope.",
            ),
        ),
        "After nine days an answer came, and it was full of kisses.",
    ),
    Wish(
        "build a snowman",
        "{Hero.they} [had waited for snow since summer|thought that winter is the best time of all].",
        "{hero} rolled two big balls of snow.",
        (
            Trouble(
                "But the snowman had only one eye and looked rather cross.",
                "button",
                "They pressed the button into the snow, and now the snowman had two eyes.",
            ),
            Trouble(
                "But the sun came out, and the snowman began to melt.",
                "parasol",
                "They opened the parasol over the snowman, and he stayed cool.",
            ),
        ),
        "The snowman seemed to smile, and perhaps he really did.",
    ),
    Wish(
        "win a race",
        "{Hero.they} [ran everywhere, even to breakfast|had never won anything before].",
        "{hero} stood at the start and counted to three.",
        (
            Trouble(
                "But after ten steps a shoe came off and flew into a bush.",
                "shoelace",
                "They threaded the shoelace and made a double bow.",
            ),
            Trouble(
                "But the path was so twisted that {hero} lost the way.",
                "flag",
                "They put up the flag at the finish, where it could be seen from everywhere.",
            ),
        ),
        "Then {hero} ran like the wind and came in first, by the length of a nose.",
    ),
    Wish(
        "find a treasure",
        "{Hero.they} [had found an old map under the bed|dreamed of islands and secret doors].",
        "{hero} took a spade and dug where the map showed a cross.",
        (
            Trouble(
                "But the chest was locked, and shaking it did no good.",
                "key",
                "They turned the key, and the lock went click.",
            ),
            Trouble(
                "But the map was torn, and half of the way was missing.",
                "thread",
                "They sewed the map together with the thread, and the way was whole again.",
            ),
        ),
        "Inside the chest lay a hundred glass marbles, and they shone like little suns.",
    ),
    Wish(
        "build a tower",
        "{Hero.they} [wanted to look over all the roofs|had collected stones for a whole year].",
        "{hero} laid one stone on top of another.",
        (
            Trouble(
                "But the stones wobbled, and the tower came down with a crash.",
                "trowel",
                "They spread mud between the stones with the trowel, and nothing wobbled any more.",
            ),
            Trouble(
                "But soon the tower was so high that {hero} could not reach the top.",
                "ladder",
                "They leaned the ladder against the wall and climbed up together.",
            ),
        ),
        "From the top of the tower they could see as far as tomorrow.",
    ),
    Wish(
        "cook a big soup",
        "{Hero.they} [wanted everybody to have enough to eat|had a huge pot and nothing to put in it].",
        "{hero} cut carrots and onions until the pot was full.",
        (
            Trouble(
                "But the fire was lazy and did not want to burn.",
                "fan",
                "They waved the fan until the fire crackled and danced.",
            ),
            Trouble(
                "But the soup tasted of nothing at all.",
                "salt jar",
                "They took two pinches from the salt jar and stirred nine times.",
            ),
        ),
        "The soup was so good that even the spoons wanted more.",
    ),
    Wish(
        "float through the air",
        "{Hero.they} [wished to be as light as a feather|wanted to say hello to the birds].",
        "{hero} jumped from a little wall and flapped as hard as possible.",
        (
            Trouble(
                "But down {hero.they} came, straight into a heap of leaves.",
                "balloon",
                "They held on to the balloon, and slowly the ground sank away.",
            ),
            Trouble(
                "But the wall was low, and the flight was over at once.",
                "swing",
                "They hung the swing on the tallest tree and pushed it higher and higher.",
            ),
        ),
        "The air was soft, the world was small, and {hero} shouted with joy.",
    ),
    Wish(
        "learn to read",
        "{Hero.they} [was sure that books whisper at night|wanted to know what the signs were saying].",
        "{hero} sat down with a fat book and opened it.",
        (
            Trouble(
                "But the letters were so tiny that they looked like ants.",
                "magnifying glass",
                "They held the magnifying glass over the page, and the letters grew big and friendly.",
            ),
            Trouble(
                "But somebody had torn out all the pages with the easy words.",
                "picture book",
                "They began with the picture book, one letter and one picture at a time.",
            ),
        ),
        "By evening {hero} read the first whole page aloud, and it was about a brave snail.",
    ),
    Wish(
        "dance at the party",
        "{Hero.they} [tapped along to every sound|had practised in secret for weeks].",
        "{hero} came early and stood in the middle of the floor.",
        (
            Trouble(
                "But there was no music, and nobody dances without music.",
                "drum",
                "They beat the drum, slowly at first and then faster and faster.",
            ),
            Trouble(
                "But one shoe was lost, and the floor was cold.",
                "slipper",
                "They found that the slipper fitted as if it had been made for the dance.",
            ),
        ),
        "Round and round went {hero}, and soon everybody was dancing.",
    ),
    Wish(
        "learn to juggle",
        "{Hero.they} [had seen it once at the circus|tried it with apples, with spoons and with socks].",
        "{hero} threw the first ball into the air.",
        (
            Trouble(
                "But the balls rolled away in all directions.",
                "basket",
                "They collected the balls in the basket and tried again, one ball at a time.",
            ),
            Trouble(
                "But there were only two balls, and juggling needs three.",
                "ball",
                "They added the ball to the other two.",
            ),
        ),
        "Up flew the balls, over and under, and not one of them fell.",
    ),
)
