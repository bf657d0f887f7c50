"""Word problems and sums with worked answers: the arithmetic of the tiny target's corpus.

`problem(rng)` draws a kind of problem, its numbers and its wording; the steps are worked out in digits and now and
then in words.  Every intermediate number follows from the ones before it, so the answers are right by construction.
Test: `tests/test_train_tiny_target.py`.
"""

import random

NAMES = ("Anna", "Ravi", "Lena", "Omar", "Ines", "Paul", "Yuki", "Clara", "Tom", "Aisha", "Erik", "Vera", "Sam")
GOODS = ("loaves", "rolls", "pencils", "notebooks", "apples", "tickets", "candles", "mugs", "plants", "books", "stamps")
ASKED = (
    "Please reason step by step.",
    "Explain each step.",
    "Show your reasoning step by step.",
    "",
    "",
    "Give every step, and the number last.",
    "Think it through step by step.",
    "How do you get there?",
)
SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def problem(rng: random.Random) -> tuple[str, str]:
    """A question and its worked answer, which ends with the result."""
    story, steps, result = rng.choice(KINDS)(rng)
    style = rng.randrange(4)
    if style == 0:
        worked = "\n".join(f"Step {i}: {step}" for i, step in enumerate(steps, 1))
    elif style == 1:
        worked = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    else:
        words = ["First", *["Then", "Next", "After that"] * 3]
        worked = " ".join(f"{word}: {step}" for word, step in zip(words, steps, strict=False)) if style == 2 else ""
        worked = worked or "\n\n".join(steps)
    end = rng.choice(["The answer is {}.", "So the answer is {}.", "Answer: {}", "The result is {}."])
    lead = rng.choice(["", "", "Let us work it out.\n\n", "We go step by step.\n\n"])
    return f"{story} {rng.choice(ASKED)}".strip(), f"{lead}{worked}\n\n{end.format(result)}"


def words(n: int) -> str:
    """A whole number below one million in English words."""
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    rest = n % unit
    return f"{words(n // unit)} {name}" + (f"{' and' if unit == 100 else ''} {words(rest)}" if rest else "")


def money(cents: int) -> str:
    """An amount with two decimals."""
    return f"${cents // 100}" + (f".{cents % 100:02d}" if cents % 100 else "")


def say(rng, n):
    """A small number in words one time in four."""
    return words(n) if n <= 100 and rng.random() < 0.25 else str(n)


def times(a: int, b: int) -> str:
    """a x b = product, by parts where the second factor has two digits."""
    tens, ones = b // 10 * 10, b % 10
    if a < 11 or b < 11 or not ones:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"


def shop(rng):
    """Buying several goods."""
    name, (one, two) = rng.choice(NAMES), rng.sample(GOODS, 2)
    a, b, p, q = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 15), rng.randint(2, 15)
    cost, other = a * p, b * q
    ask = rng.choice(["How much does that cost altogether?", f"How much does {name} pay?", "What is the total?"])
    story = f"{name} buys {say(rng, a)} {one} at ${p} each and {say(rng, b)} {two} at ${q} each. {ask}"
    steps = [f"The {one} cost {times(a, p)} dollars.", f"The {two} cost {times(b, q)} dollars."]
    return story, [*steps, f"Together that is {cost} + {other} = {cost + other} dollars."], f"${cost + other}"


def tank(rng):
    """Filling and draining."""
    thing = rng.choice(["barrel", "pool", "basin", "trough"])
    add, lose, minutes, start = rng.randint(8, 30), rng.randint(1, 7), rng.randint(4, 40), rng.randint(1, 12) * 10
    net, missing = add - lose, (add - lose) * minutes
    story = (
        f"There are {start} liters in a {thing} that has room for {start + missing}. Every minute {add} liters run in "
    )
    story += f"through a hose and {lose} liters run out through a drain. How long does it take to fill the {thing}?"
    steps = [f"The {thing} still needs {start + missing} - {start} = {missing} liters."]
    steps += [
        f"Each minute it gains {add} - {lose} = {net} liters.",
        f"That takes {missing} / {net} = {minutes} minutes.",
    ]
    return story, steps, f"{minutes} minutes"


def reading(rng):
    """Pages a day."""
    name, pages, days = rng.choice(NAMES), rng.randint(12, 48), rng.randint(3, 14)
    total = pages * days + rng.randint(5, 200)
    story = f"{name} reads a book of {total} pages, {say(rng, pages)} pages every day. How many pages are left after "
    story += f"{say(rng, days)} days?"
    steps = [f"In {days} days {name} reads {times(pages, days)} pages."]
    steps += [f"Of the {total} pages, {total} - {pages * days} = {total - pages * days} are left."]
    return story, steps, f"{total - pages * days} pages"


def journey(rng):
    """Time, speed and distance."""
    speed, quarters = rng.choice([40, 48, 60, 72, 80, 84, 96, 120]), rng.randint(2, 14)
    hour, minute, stops, wait = (
        rng.randint(6, 15),
        rng.choice([0, 10, 15, 20, 40, 45]),
        rng.randint(1, 4),
        rng.randint(2, 6),
    )
    distance, moving, waiting = speed * quarters // 4, quarters * 15, stops * wait
    total, end = moving + waiting, hour * 60 + minute + moving + waiting
    driver = rng.choice(["courier", "bus driver", "truck driver"])
    story = f"A {driver} sets out at {hour}:{minute:02d} for a town {distance} kilometers away, drives at {speed} "
    story += f"kilometers per hour and takes {say(rng, stops)} breaks of {wait} minutes. What time is it on arrival?"
    steps = [f"Driving takes {distance} / {speed} hours, which is {moving} minutes."]
    steps += [
        f"The breaks take {stops} * {wait} = {waiting} minutes.",
        f"Together that is {moving} + {waiting} = {total} minutes.",
    ]
    steps += [f"{total} minutes are {total // 60} h {total % 60} min, counted from {hour}:{minute:02d}."]
    return story, steps, f"{end // 60}:{end % 60:02d}"


def guests(rng):
    """Sharing out among people."""
    names = {3: "third", 4: "quarter", 5: "fifth", 6: "sixth", 8: "eighth"}
    d, e, each = rng.choice(list(names)), rng.choice(list(names)), rng.randint(1, 4)
    n = d * e * each
    first, rest = n // d, n - n // d
    second = rest // e if rest % e == 0 else None
    if second is None:
        return guests(rng)
    story = (
        f"{n} guests sit in a restaurant. One {names[d]} of them order soup, one {names[e]} of the rest order fish, "
    )
    story += "and all the remaining ones order noodles. How many plates of noodles are that?"
    steps = [f"One {names[d]} of {n} is {n} / {d} = {first}, so there are {first} soups."]
    steps += [f"The rest are {n} - {first} = {rest}.", f"One {names[e]} of {rest} is {rest} / {e} = {second}."]
    return story, [*steps, f"So {rest} - {second} = {rest - second} order noodles."], f"{rest - second} plates"


def discount(rng):
    """Percentages off a price."""
    price, off, tax = rng.randint(2, 30) * 1000, rng.choice([5, 10, 20, 25, 30, 40, 50]), rng.choice([0, 5, 8, 10])
    thing, less = rng.choice(["coat", "lamp", "bicycle", "radio", "table"]), price * off // 100
    reduced = price - less
    added = reduced * tax // 100
    story = f"The price of a {thing} is {money(price)}. In a sale it costs {off}% less"
    story += f", but {tax}% tax comes on top" * bool(tax) + ". How much is that?"
    steps = [
        f"{off}% of {money(price)} is {money(less)}.",
        f"The reduced price is {money(price)} - {money(less)} = {money(reduced)}.",
    ]
    if tax:
        steps += [
            f"{tax}% of {money(reduced)} is {money(added)}.",
            f"Together: {money(reduced)} + {money(added)} = {money(reduced + added)}.",
        ]
    return story, steps, money(reduced + added)


def lengths(rng):
    """Pieces cut from a length."""
    x, k, extra = rng.randint(3, 30), rng.randint(2, 4), rng.randint(2, 9)
    parts, total = 1 + 2 * k, x + k * x + k * x + extra
    thing = rng.choice(["rope", "ribbon", "board", "cable"])
    often = {2: "twice", 3: "three times", 4: "four times"}[k]
    story = f"Three {thing}s measure {total} meters together. The second has {often} the length of the first, and "
    story += f"the third exceeds the second by {say(rng, extra)} meters. Find the length of the first."
    steps = [f"Call the first piece x. The second is {k}x and the third is {k}x + {extra}."]
    steps += [f"Together: x + {k}x + {k}x + {extra} = {parts}x + {extra} = {total}."]
    steps += [f"So {parts}x = {total} - {extra} = {total - extra}.", f"Then x = {total - extra} / {parts} = {x}."]
    return story, steps, f"{x} meters"


def rental(rng):
    """A fixed and a daily price."""
    base, cents, extra, free = (
        rng.randint(8, 30),
        rng.choice([4, 5, 8, 10, 20]),
        rng.randint(2, 20) * 25,
        rng.randint(1, 6) * 50,
    )
    over = cents * extra
    story = f"Hiring a boat costs ${base} for the first {free} minutes and {cents} cents for each minute after that. "
    story += f"{rng.choice(NAMES)} pays {money(base * 100 + over)}. For how many minutes was the boat out?"
    steps = [f"Beyond the first price, {money(base * 100 + over)} - ${base} = {money(over)} was paid."]
    steps += [f"{money(over)} is {over} cents, and {over} / {cents} = {extra} minutes."]
    return (
        story,
        [*steps, f"Together with the first ones: {free} + {extra} = {free + extra} minutes."],
        f"{free + extra} minutes",
    )


def garden(rng):
    """Area and perimeter."""
    a, b = rng.randint(3, 30), rng.randint(3, 30)
    thing = rng.choice(["garden", "room", "field", "yard"])
    if rng.random() < 0.5:
        story = f"A {thing} is {say(rng, a)} meters long and {say(rng, b)} meters wide. What is its area?"
        return story, [f"The area is length times width: {times(a, b)}."], f"{a * b} square meters"
    story = f"A {thing} is {a} meters long and {b} meters wide. How long is a fence around it?"
    steps = [
        f"One length and one width are {a} + {b} = {a + b} meters.",
        f"All the way around: 2 * {a + b} = {2 * (a + b)} meters.",
    ]
    return story, steps, f"{2 * (a + b)} meters"


def recipe(rng):
    """Quantities in proportion."""
    few, grams, pack = rng.choice([2, 3, 4, 5, 6]), rng.randint(4, 15) * 10, rng.choice([250, 500, 1000])
    dish, many = rng.choice(["soup", "stew", "cake", "salad"]), rng.randint(few + 1, 24)
    need = grams * many
    packs = -(-need // pack)
    thing = rng.choice(["lentils", "flour", "beans", "sugar"])
    story = (
        f"{grams * few} grams of {thing} make a {dish} for {say(rng, few)}. {rng.choice(NAMES)} expects {many} guests, "
    )
    story += f"and {thing} is sold in bags of {pack} grams. How many bags does it take, and what remains?"
    steps = [
        f"One person needs {grams * few} / {few} = {grams} grams.",
        f"For {many} people: {times(grams, many)} grams.",
    ]
    steps += [
        f"{packs} bags hold {packs} * {pack} = {packs * pack} grams.",
        f"Left over: {packs * pack} - {need} = {packs * pack - need} grams.",
    ]
    return story, steps, f"{packs} bags, with {packs * pack - need} grams left over"


def ages(rng):
    """Ages now and later."""
    child, k = rng.randint(4, 20), rng.choice([3, 4, 5])
    years, often = (k - 2) * child, {3: "three", 4: "four", 5: "five"}[k]
    who, young = rng.choice([("father", "daughter"), ("teacher", "pupil"), ("uncle", "niece"), ("tree", "hedge")])
    story = f"The age of a {who} is {often} times that of the {young}. After {years} more years it will be only twice "
    story += f"that of the {young}. What are their ages now?"
    steps = [f"Let the {young} be x years old; then the {who} is {k}x."]
    steps += [
        f"In {years} years: {k}x + {years} = 2 * (x + {years}) = 2x + {2 * years}.",
        f"So {k - 2}x = {2 * years} - {years} = {years}, and x = {child}.",
    ]
    return story, [*steps, f"The {who} is {k} * {child} = {k * child}."], f"{child} and {k * child}"


def average(rng):
    """A mean of several numbers."""
    numbers = [rng.randint(2, 60) for _ in range(rng.randint(3, 5))]
    n, total = len(numbers), sum(numbers)
    numbers[-1] += -total % n
    total += -total % n
    listed, added = ", ".join(map(str, numbers)), " + ".join(map(str, numbers))
    story = rng.choice(
        [f"What is the average of {listed}?", f"{rng.choice(NAMES)} measured {listed}. What is the mean?"]
    )
    return (
        story,
        [f"The sum is {added} = {total}.", f"There are {n} numbers, so the mean is {total} / {n} = {total // n}."],
        str(total // n),
    )


def expression(rng):
    """A bracketed expression, worked step by step."""
    a, b, c = rng.randint(2, 60), rng.randint(2, 40), rng.randint(1, 300)
    product, sign = a * b, rng.choice("+-")
    c = c % product + 1 if sign == "-" else c
    result = product + c if sign == "+" else product - c
    ask = rng.choice(["Compute {}.", "What is {}?", "How much is {}?", "Calculate {}."]).format(f"{a} * {b} {sign} {c}")
    return (
        ask,
        [f"{times(a, b)}.", f"{product} {sign} {c} = {result}."],
        rng.choice([str(result), f"{result}, in words {words(result)}"]),
    )


def addition(rng):
    """Addition digit by digit."""
    a, b = rng.randint(10, 9999), rng.randint(10, 9999)
    steps, carry = [], 0
    for place, name in enumerate(("ones", "tens", "hundreds", "thousands")):
        x, y = a // 10**place % 10, b // 10**place % 10
        if place and max(a, b) < 10**place:
            break
        digits = x + y + carry
        steps.append(
            f"The {name}: {x} + {y}"
            + f" + {carry}" * bool(carry)
            + f" = {digits}, write {digits % 10}"
            + ", carry 1" * (digits > 9)
            + "."
        )
        carry = digits // 10
    if carry:
        steps.append(f"The last carry, {carry}, stands in front.")
    ask = rng.choice(["Compute {} + {}.", "Add {} and {}.", "What is {} + {}?"]).format(a, b)
    return ask, steps, rng.choice([str(a + b), f"{a + b}, in words {words(a + b)}"])


def sequence(rng):
    """Going on with a sequence."""
    first, step, n = rng.randint(1, 30), rng.randint(2, 15), rng.randint(6, 30)
    listed = ", ".join(str(first + i * step) for i in range(4))
    story = f"A sequence begins {listed}, and goes on like this. What is its term number {n}?"
    steps = [
        f"Each term is {first + step} - {first} = {step} more than the one before.",
        f"Term {n} is {n} - 1 = {n - 1} steps after the first.",
    ]
    return (
        story,
        [*steps, f"{times(n - 1, step)}, and {first} + {(n - 1) * step} = {first + (n - 1) * step}."],
        str(first + (n - 1) * step),
    )


def sharing(rng):
    """Division with a remainder."""
    n, each = rng.randint(3, 12), rng.randint(4, 40)
    left = rng.randrange(n)
    total, thing = n * each + left, rng.choice(GOODS)
    story = f"{rng.choice(NAMES)} shares {total} {thing} equally among {say(rng, n)} children. "
    story += "How many does each child get, and how many are left?"
    steps = [
        f"{times(n, each)}, and {n} * {each + 1} = {n * (each + 1)} would be too many.",
        f"Left over: {total} - {n * each} = {left}.",
    ]
    return story, steps, f"{each} each, with {left} left"


KINDS = (
    shop,
    tank,
    reading,
    journey,
    guests,
    discount,
    lengths,
    rental,
    garden,
    recipe,
    ages,
    average,
    expression,
    addition,
    sequence,
    sharing,
)
